"""An image classifier over DINOv3, which transformers does not have yet.

The head is that of `Dinov2ForImageClassification`: a linear projection of the class token beside the mean of the patch
tokens. The module uses nothing of this package, because transformers copies it into the folder of a plain model that is
saved (`register_for_auto_class`); from there it loads, with `trust_remote_code=True`, where this package is absent.
"""

import torch
import transformers
from torch import nn
from transformers import AutoModelForImageClassification, DINOv3ViTConfig, DINOv3ViTModel, DINOv3ViTPreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput


class DINOv3ViTForImageClassification(DINOv3ViTPreTrainedModel):
    """DINOv3 ViT with a linear classifier.

    Args:
        config: The config of the backbone, with `num_labels`.
    """

    base_model_prefix = "dinov3_vit"

    def __init__(self, config: DINOv3ViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dinov3_vit = DINOv3ViTModel(config)
        self.classifier = (
            nn.Linear(config.hidden_size * 2, config.num_labels) if config.num_labels > 0 else nn.Identity()
        )
        self.post_init()

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: bool,
    ) -> ImageClassifierOutput | tuple:
        """Classify images.

        Args:
            pixel_values: (B, 3, H, W).
            labels: (B,) class indices, or what else the problem type takes.
            return_dict: Whether to return an output object rather than a tuple.
            **kwargs: As for `DINOv3ViTModel`.

        Returns:
            Logits (B, C), and the loss where there are labels.
        """
        outputs = self.dinov3_vit(pixel_values, return_dict=True, **kwargs)
        tokens = outputs.last_hidden_state
        patches = tokens[:, 1 + self.config.num_register_tokens :]
        logits = self.classifier(torch.cat([tokens[:, 0], patches.mean(dim=1)], dim=1))
        output = ImageClassifierOutput(
            loss=None if labels is None else self.loss_function(labels, logits, self.config),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        wants_object = self.config.return_dict if return_dict is None else return_dict
        return output if wants_object else output.to_tuple()


if not hasattr(transformers, DINOv3ViTForImageClassification.__name__):
    DINOv3ViTForImageClassification.register_for_auto_class("AutoModelForImageClassification")
    AutoModelForImageClassification.register(DINOv3ViTConfig, DINOv3ViTForImageClassification, exist_ok=True)
