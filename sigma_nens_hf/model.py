"""The tuner: injects an adapter into a transformers model, switches, saves, loads and removes it."""

import copy
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import transformers
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _ExcludedModule
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from .adapter_plan import AdapterPlan, plan_adapter
from .adapter_weights import (
    check_finite,
    check_weights,
    shapes_of_adapter,
    shapes_of_embeddings,
    under_current_names,
)
from .blocks import block_names
from .config import SigmaNormConfig
from .heads import MemberHead, has_output_per_label, size_shared_heads
from .integrity import check_digest, tensor_digest
from .labels import LabelSet
from .layer import MemberLayer, SigmaNormLayer
from .members import base_model_of, branch_at, install_hooks, remove_hooks
from .norms import selects
from .outputs import MEMBER_LOGITS
from .precision import restore_precision, train_in_full_precision
from .registration import PARAMETER_PREFIX
from .version import __version__

MEAN = "mean"


class SigmaNormModel(BaseTuner):
    """Injects sigma-norm members into a transformers classifier.

    Users come here through `peft.get_peft_model(model, SigmaNormConfig(...))` or `PeftModel.from_pretrained`.

    Args:
        model: The base model, a transformers classifier.
        peft_config: The config, or configs by adapter name.
        adapter_name: Name of the adapter to inject.

    Raises:
        ValueError: The model or the config does not fit the method; the message names the cause.
    """

    prefix = PARAMETER_PREFIX
    tuner_layer_cls = MemberLayer

    # Of the adapter that is being injected, when peft asks for every module whether it is a target.
    _plan: AdapterPlan | None = None
    # The base model's own labels, shown again while adapters are disabled and after unloading.
    _base_labels: LabelSet | None = None
    # Its padding token likewise.
    _base_pad_token_id: int | None = None

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Inject one adapter and put the hooks on the model; peft's arguments.

        Raises:
            ValueError: The model or the config is not supported, or the name could not be that of a folder.
        """
        if not adapter_name or adapter_name in (".", "..") or {"/", "\\", os.sep} & set(adapter_name):
            # peft saves an adapter in a folder of its name, which must not be anywhere else.
            raise ValueError(f"An adapter's name becomes that of a folder, which {adapter_name!r} cannot be.")
        if self._base_labels is None:
            _check_base_model(model)
            self._base_labels = LabelSet.of_model(model)
            self._base_pad_token_id = getattr(model.config.get_text_config(), "pad_token_id", None)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        size_shared_heads(model, self._plan.head, adapter_name, config.num_labels)
        train_in_full_precision(model, adapter_name)
        config.base_model_type = model.config.model_type
        config.base_model_class = type(model).__name__
        config.num_adapted_norms = len(self._plan.norms | self._plan.shared_norms)
        config.sigma_nens_hf_version = config.sigma_nens_hf_version or __version__
        config.transformers_version = config.transformers_version or transformers.__version__
        # A temperature that is fitted later is this adapter's alone, though another may be made from the same config;
        # copied no sooner, since peft reads what was filled in from the one that it was given.
        self.peft_config[adapter_name] = copy.deepcopy(config)
        model.peft_config = self.peft_config
        layer_name = next(name for name, module in model.named_modules() if isinstance(module, MemberLayer))
        install_hooks(model, layer_name, [model.get_submodule(name) for name in block_names(model)])
        branch_at(model, adapter_name, self._plan.branch_block)
        ignored = list(getattr(model.config, "keys_to_ignore_at_inference", []))
        model.config.keys_to_ignore_at_inference = list(dict.fromkeys([*ignored, MEMBER_LOGITS]))
        self._show_active_labels()

    def _prepare_adapter_config(self, peft_config: SigmaNormConfig, model_config: dict) -> SigmaNormConfig:
        return peft_config  # targets depend on the model's classes, which only `_prepare_model` sees

    def _prepare_model(self, peft_config: SigmaNormConfig, model: PreTrainedModel) -> None:
        """Plan the adapter; nothing has been changed yet if that fails."""
        self._plan = plan_adapter(model, peft_config, self._base_labels)

    def _check_target_module_exists(self, peft_config: SigmaNormConfig, key: str) -> bool | _ExcludedModule:
        if peft_config.exclude_modules and selects(peft_config.exclude_modules, key):
            return _ExcludedModule()  # or peft would warn that nothing is excluded
        return key in self._plan.norms | self._plan.shared_norms or key in self._plan.head.member

    def _create_and_replace(
        self,
        peft_config: SigmaNormConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
    ) -> None:
        layer = target
        if current_key in self._plan.norms | self._plan.shared_norms:
            if not isinstance(target, MemberLayer):
                layer = SigmaNormLayer(target)
            layer.update_layer(adapter_name, peft_config, self._plan.role_of(current_key, peft_config))
        else:
            if not isinstance(target, MemberLayer):
                layer = MemberHead(target)
            out_features = layer.base_layer.out_features
            if current_key in self._plan.head.architecture.outputs and has_output_per_label(self.model):
                out_features = peft_config.num_labels
            layer.update_layer(adapter_name, peft_config, self.model, current_key, out_features)
        if layer is not target:
            if adapter_name not in self.active_adapters:
                layer.requires_grad_(False)
            self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # Member layers place their own parameters; peft's version fails on modules without a weight, such as a pooler.
        setattr(parent, child_name, new_module)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Make one adapter the active one, together with its labels.

        Args:
            adapter_name: The adapter.
            inference_mode: Whether to leave it frozen.

        Raises:
            ValueError: More than one adapter is named; members of different adapters cannot share a batch.
        """
        if not isinstance(adapter_name, str) and len(adapter_name) > 1:
            raise ValueError(f"Exactly one sigma-norm adapter can be active at a time, got {list(adapter_name)}.")
        super().set_adapter(adapter_name, inference_mode=inference_mode)
        self._show_active_labels()

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        super()._enable_adapter_layers(enabled)
        self._show_active_labels()

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; with the last one the model becomes its plain self again, wrappers aside."""
        was_active = adapter_name in self.active_adapters
        super().delete_adapter(adapter_name)
        if not self.peft_config:
            self._remove_traces()
        elif was_active:  # peft makes one active in every layer for itself, and none where the others have no norm
            name, config = next(iter(self.peft_config.items()))
            self.set_adapter(name, config.inference_mode)
        else:
            self._show_active_labels()

    def _show_active_labels(self) -> None:
        """Put the labels on the model that its next output will speak of."""
        layers = [module for module in self.model.modules() if isinstance(module, MemberLayer)]
        disabled = any(layer.disable_adapters for layer in layers)
        active = [self.peft_config[name] for name in self.active_adapters if name in self.peft_config]
        self._show_labels_of(active[0] if active and layers and not disabled else None)

    def _show_labels_of(self, config: SigmaNormConfig | None) -> None:
        """Put the labels and the padding token of an adapter on the model, or the base model's own."""
        labels, pad_token_id = self._base_labels, self._base_pad_token_id
        if config is not None:
            labels = LabelSet.of_adapter(config, default=self._base_labels)
            pad_token_id = pad_token_id if config.pad_token_id is None else config.pad_token_id
        labels.put_on_model(self.model)
        text_config = self.model.config.get_text_config()
        if hasattr(text_config, "pad_token_id"):
            text_config.pad_token_id = pad_token_id

    def _remove_traces(self) -> None:
        remove_hooks(self.model)
        self.model.config.__dict__.pop("keys_to_ignore_at_inference", None)
        self._show_labels_of(None)

    def unload(self) -> nn.Module:
        """Return the base model as it was before: no adapter, no hooks, its own modules and labels."""
        for module in self.model.modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                module.set_adapter([])  # or peft would leave the trained copies in place
        model = super().unload()
        self._remove_traces()
        return model

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        """Refuse peft's batches of mixed adapters, which it would otherwise ignore.

        Raises:
            ValueError: `adapter_names` is given.
        """
        if kwargs.get("adapter_names") is not None:
            raise ValueError("Members of different adapters cannot share a batch; use set_adapter, not adapter_names.")
        return nullcontext()

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse peft's in-place merge.

        Raises:
            ValueError: Always; M members do not fit into one set of weights.
        """
        raise ValueError(
            "An ensemble cannot be merged in place. `model.merge_and_unload(member=k)` returns the plain model of "
            "member k."
        )

    @torch.no_grad()
    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        member: int | Literal["mean"] | None = None,
    ) -> nn.Module:
        """Return the plain transformers model of one member, or of the mean of all; the ensemble is used up.

        Args:
            progressbar: As in peft.
            safe_merge: Check that the member's parameters are finite first.
            adapter_names: The adapter to take the member from; None: the active one.
            member: Index of the member, 0 to M - 1, or "mean", as in `extract_mean`. May be left out for M = 1.

        Raises:
            ValueError: No member is named though there are several, the index is out of range, more than one adapter
                is named, or `safe_merge` finds numbers that are not finite.
        """
        names = adapter_names or self.active_adapters
        if len(names) != 1 or names[0] not in self.peft_config:
            raise ValueError(f"Name one adapter to merge out of {list(self.peft_config)}, got {list(names)}.")
        config = self.peft_config[names[0]]
        if member is None and config.num_members > 1:
            raise ValueError(
                f"{config.num_members} members cannot be merged into one set of weights. Name the one to take out: "
                f"merge_and_unload(member=k) with k from 0 to {config.num_members - 1}."
            )
        if member == MEAN:
            members = tuple(range(config.num_members))
        elif member in (None, *range(config.num_members)):
            members = (member or 0,)
        else:
            raise ValueError(f"member must be from 0 to {config.num_members - 1}, or {MEAN!r}, got {member!r}.")
        self._enable_adapter_layers()
        self.set_adapter(names[0])
        layers = [module for module in self.model.modules() if isinstance(module, MemberLayer)]
        layers = [layer for layer in layers if layer.member_adapter is not None]
        if safe_merge:
            for layer in layers:
                for parameter in layer.parameters():
                    check_finite(type(layer).__name__, parameter)
        for layer in layers:
            layer.set_members(names[0], members)
        # The generic unloading puts trained copies of shared modules and the base layers, now the members', in place.
        model = self._unload_and_optionally_merge(merge=False, progressbar=progressbar)
        restore_precision(model)
        self._remove_traces()
        self._show_labels_of(config)
        return model

    @classmethod
    def _get_adapter_state_dict(cls, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Select the adapter's weights, and refuse to save what could not be loaded.

        Raises:
            ValueError: They hold numbers that are not finite.
        """
        weights = super()._get_adapter_state_dict(*args, **kwargs)
        for key, tensor in weights.items():
            check_finite(key, tensor)
        return weights

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls,
        model: nn.Module,
        config: SigmaNormConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Map the file's keys to the model's, and refuse a file that does not fit exactly.

        peft itself lets missing keys pass with a warning, which would leave random scalers in place.

        Raises:
            ValueError: Keys are missing, unexpected or of another shape, or hold numbers that are not finite.
        """
        base_model, shapes = base_model_of(model), shapes_of_adapter(model, adapter_name)
        try:
            state_dict = under_current_names(state_dict, shapes, adapter_name, model, base_model)
            remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
            shapes |= shapes_of_embeddings(model, base_model, remapped.keys())
            check_weights(remapped, shapes, f"{type(base_model).__name__} with {config.num_members} members")
            check_digest(map(tensor_digest, remapped.values()), config.weights_digest, "The adapter")
            config.weights_digest = None  # peft keeps this config when it loads other weights into the same adapter
        except ValueError:
            if isinstance(model, PeftModel):
                model.delete_adapter(adapter_name)  # or it would stay, with random members
            raise
        return remapped


def extract_member(model: nn.Module, member: int) -> PreTrainedModel:
    """Return a plain transformers model that computes one member's logits; the ensemble stays as it is.

    Args:
        model: The ensemble.
        member: Index of the member, 0 to M - 1.

    Raises:
        ValueError: The index is out of range.
    """
    return copy.deepcopy(model).merge_and_unload(member=member)


def extract_mean(model: nn.Module) -> PreTrainedModel:
    """Return a plain transformers model whose gains, biases and heads are the means of the members'.

    It is one model, no ensemble: its members have nothing left to disagree about, and its predictions are not the mean
    of theirs. How good it is must be measured; the more the members differ, the worse. The ensemble stays as it is.

    Source: weight averaging as in model soups (arXiv 2203.05482).

    Args:
        model: The ensemble.
    """
    return copy.deepcopy(model).merge_and_unload(member=MEAN)


def _check_base_model(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"The base model must be a transformers model, got {type(model).__name__}.")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "The base model already carries layers of another PEFT method. Merge or unload them first; stacking is "
            "not supported."
        )
