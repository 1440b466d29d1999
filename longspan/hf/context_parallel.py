"""Context parallelism of transformers models: their arguments and outputs, for one piece of every sequence."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.modeling_outputs import BaseModelOutputWithPast

from longspan.distributed import ContextParallel
from longspan.layout import Packing
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel


class LongspanContextParallel(ContextParallel):
    """A model of `longspan.hf` whose ranks each run one piece of every sequence; see `ContextParallel`.

    Args:
        model: The model; one for sequence-to-sequence is divided as its `model`, an `EncoderDecoder`.
        group: The ranks, in the order of their pieces.
    """

    def __init__(self, model: Any, group: dist.ProcessGroup | DeviceMesh) -> None:
        if isinstance(model.model, EncoderDecoder):
            raise ValueError(
                f"a {type(model).__name__} is divided as the longspan model in it: pass model.model, whose loss takes "
                "pieces of the target and of the source"
            )
        if isinstance(model.model, Classifier) and model.model.config.pooling == "none":
            raise ValueError(
                f"a {type(model).__name__} is divided as the longspan model in it: pass model.model, which returns the "
                "logits of this rank's tokens"
            )
        super().__init__(model.model, group)
        self._outer = (model,)  # not a module of its own: it shares all weights with `model`

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        packing: Packing | None = None,
    ) -> Any:
        """Compute this rank's logits, and the loss over all ranks if labels are given.

        Args:
            input_ids: (B, T) this rank's tokens.
            attention_mask: (B, T), 0 for padding.
            labels: (B, T) this rank's labels, −100 for tokens to ignore; a causal model shifts them by one, over the
                ends of pieces. Of a classifier (B,), equal on all ranks.
            packing: The packing of the whole sequence, equal on all ranks.

        Returns:
            What the model returns, without a cache.
        """
        (outer,), model = self._outer, self.model
        mask = None if attention_mask is None else attention_mask.bool()
        if isinstance(model, Classifier):
            logits = self._classify(model, input_ids, mask, packing)
            loss = None
            if labels is not None:
                loss = outer.loss_function(labels=labels, pooled_logits=logits, config=outer.config)
            return outer.output_type(loss=loss, logits=logits)
        assert isinstance(model, LanguageModel)
        shard = self._shard("forward", input_ids, mask, packing, labels_given=labels is not None)
        hidden = model.hidden(input_ids, _layout=shard.layout(input_ids, mask))
        if outer.output_type is BaseModelOutputWithPast:
            return BaseModelOutputWithPast(last_hidden_state=hidden)
        logits, loss = model.logits(hidden), None
        if labels is not None:
            labels = shard.following(labels) if model.config.causal else labels
            total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            loss = self.mean(total / (labels != -100).sum().clamp(min=1), labels)
        return outer.output_type(loss=loss, logits=logits)
