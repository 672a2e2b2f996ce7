import pytest
from class_order import essence, head_init_for


@pytest.fixture
def folder(checkpoint_folder):
    def save(names):
        return checkpoint_folder("vit", num_labels=len(names), id2label=dict(enumerate(names)))

    return save


TEN = ["tench, Tinca tinca", "great white shark, white shark", *[f"class {i}" for i in range(8)]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (TEN, "copy"),
        (["n01440764 tench", "n01484850 great_white_shark", *TEN[2:]], "copy"),
        ([*TEN[:9], "renamed"], "copy"),
        ([*TEN[:8], TEN[9], TEN[8]], "fresh"),
        (TEN[::-1], "fresh"),
        (TEN[:9], "auto"),  # another size: there is nothing to copy
    ],
)
def test_head_is_copied_only_for_the_same_classes_in_the_same_order(folder, names, expected):
    head_init, message = head_init_for(str(folder(TEN)), None, names)
    assert head_init == expected
    assert ("its head is not copied" in message) if expected == "fresh" else message is None


def test_two_classes_in_reverse_are_told_apart(folder):
    folder = str(folder(["NEGATIVE", "POSITIVE"]))
    assert head_init_for(folder, None, ["negative", "positive"])[0] == "copy"
    head_init, message = head_init_for(folder, None, ["positive", "negative"])
    assert head_init == "fresh"
    assert "Of the checkpoint's 2 classes 0 have the names" in message


def test_checkpoint_that_does_not_name_its_classes_is_believed_with_a_word(folder):
    head_init, message = head_init_for(str(folder(["LABEL_0", "LABEL_1"])), None, ["negative", "positive"])
    assert head_init == "auto"
    assert "--head_init fresh" in message


def test_bare_encoder_has_no_head_to_talk_of(checkpoint_folder):
    folder = checkpoint_folder("bert", encoder_only=True, num_labels=2)
    assert head_init_for(str(folder), None, ["negative", "positive"]) == ("auto", None)


def test_essence():
    assert essence("n01484850 great_white_shark") == essence("Great white shark, white shark, man-eater")
    assert essence("T-shirt/top") == "t shirt top"
