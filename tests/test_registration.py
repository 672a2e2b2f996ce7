import pickle
import subprocess
import sys

import pytest
from peft import PeftType, get_peft_config
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

from sigma_nens_hf import SigmaNormConfig, SigmaNormModel, register
from sigma_nens_hf.registration import extend_peft_type


def test_peft_knows_the_method():
    assert PeftType.SIGMA_NORM == "SIGMA_NORM"
    assert PeftType("SIGMA_NORM") is PeftType.SIGMA_NORM
    assert "SIGMA_NORM" in list(PeftType)
    assert PEFT_TYPE_TO_TUNER_MAPPING["SIGMA_NORM"] is SigmaNormModel
    assert isinstance(get_peft_config({"peft_type": "SIGMA_NORM"}), SigmaNormConfig)


def test_registering_again_changes_nothing():
    before = list(PeftType)
    register(SigmaNormConfig, SigmaNormModel)
    assert extend_peft_type() is PeftType.SIGMA_NORM
    assert list(PeftType) == before


def test_foreign_method_of_the_same_name_is_refused():
    class Foreign(SigmaNormConfig):
        pass

    with pytest.raises(RuntimeError, match="already has a method SIGMA_NORM"):
        register(Foreign, SigmaNormModel)


def test_member_survives_pickle():
    assert pickle.loads(pickle.dumps(PeftType.SIGMA_NORM)) is PeftType.SIGMA_NORM
    assert pickle.loads(pickle.dumps(SigmaNormConfig(num_members=7))).num_members == 7


def test_without_the_package_peft_names_the_method(tmp_path):
    SigmaNormConfig().save_pretrained(tmp_path)
    code = f"from peft import PeftConfig; PeftConfig.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode
    assert "KeyError: 'SIGMA_NORM'" in done.stderr  # as the docs say
