"""The losses of the stages: layer by layer from the teacher's activations, and end to end from its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.hf.swap import FAMILIES, SwappedAttention
from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.linearize.student import swapped_layers

LOGITS_CHUNK = 2048  # tokens whose logits are in memory at once


class AttentionTransfer:
    """The first stage: replaced layers learn, all at once, to reproduce the teacher's layers from the same inputs.

    The teacher runs once. As soon as a layer of it has computed its output, the student's layer does, and its loss is
    differentiated: the activations of one layer are in memory at a time. The loss is the squared error of a sequence's
    output, relative to its square, and that of the attention weights, estimated without computing them: the difference
    of two sets of weights, applied to random values, has on average the square of their difference.

    Args:
        teacher: The teacher.
        student: The student, whose other weights are the teacher's.
        rows: Weight of the attention weights.
    """

    def __init__(self, teacher: Any, student: Any, rows: float) -> None:
        self.teacher, self.rows = teacher, rows
        self.layers = {name: (teacher.get_submodule(name), layer) for name, layer in swapped_layers(student).items()}

    def backward(self, tokens: Tensor, share: float, generator: torch.Generator) -> Tensor:
        """Add the gradients of a batch (B, T), multiplied by `share`; return the loss of each layer."""
        losses: list[Tensor] = []

        def hook(layer: SwappedAttention) -> Callable[..., None]:
            def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
                target = output[0] if isinstance(output, tuple) else output
                with torch.enable_grad():
                    loss = self._loss(layer, args, kwargs, target, generator)
                    (share * loss).backward()
                losses.append(loss.detach())

            return compare

        handles = [old.register_forward_hook(hook(new), with_kwargs=True) for old, new in self.layers.values()]
        try:
            with torch.no_grad():
                self.teacher.base_model(input_ids=tokens, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack(losses)

    def _loss(
        self, layer: SwappedAttention, args: Any, kwargs: dict[str, Any], target: Tensor, generator: torch.Generator
    ) -> Tensor:
        found = layer(*args, **kwargs)[0]
        loss = _relative_error(found, target)
        if self.rows and _has_rows(layer):
            loss = loss + self.rows * _rows_error(layer, args, kwargs, generator)
        return loss


def _has_rows(layer: SwappedAttention) -> bool:
    """Whether what the mechanism computes is a mean of the values, with weights that sum to one."""
    mechanism = layer.mechanism
    memory = mechanism.memory if isinstance(mechanism, MixtureAttention) else mechanism
    return isinstance(memory, LinearAttention) and memory.normalize == "query"


def _rows_error(layer: SwappedAttention, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Tensor:
    hidden = args[0] if args else kwargs["hidden_states"]
    q, k, v = layer.heads(hidden, kwargs.get("position_embeddings"))
    # The same for all sequences, so that the loss does not depend on how a batch is divided.
    values = torch.randn(v[:1].shape, generator=generator, device=v.device).to(v).expand_as(v)
    mechanism, own = layer.mechanism, {}
    if isinstance(mechanism, MixtureAttention) and mechanism.sink:
        # The sink takes the place of the first token: both have the value 0.
        own["sink_value"] = torch.zeros_like(mechanism.sink_value)
        values = torch.cat([torch.zeros_like(values[:, :1]), values[:, 1:]], 1)
    found = torch.func.functional_call(mechanism, own, (q, k, values), {"causal": layer.causal})
    with torch.no_grad():
        queries, keys, randoms = (x.transpose(1, 2) for x in (q, k, values))
        grouped, scale = q.shape[2] > k.shape[2], getattr(layer.mechanism, "scale", None)
        target = F.scaled_dot_product_attention(
            queries, keys, randoms, is_causal=layer.causal, scale=scale, enable_gqa=grouped
        )
    return _relative_error(found, target.transpose(1, 2))


def _relative_error(found: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of each sequence (B, ...) relative to its square, averaged over sequences."""
    found, target = found.float().flatten(1), target.detach().float().flatten(1)
    return ((found - target).square().mean(1) / target.square().mean(1).clamp(min=1e-12)).mean()


class Distillation:
    """The second and third stages: the teacher's distribution of every token, and the next token of the text.

    Args:
        teacher: The teacher.
        student: The student.
        next_token: Weight of the text's own tokens.
        compiled: Whether to compile the losses.
    """

    def __init__(self, teacher: Any, student: Any, next_token: float, compiled: bool = False) -> None:
        self.teacher, self.student, self.next_token = teacher, student, next_token
        self._heads = OutputHead.of(student), OutputHead.of(teacher)
        self._losses = _compiled_losses() if compiled else _losses

    def backward(self, tokens: Tensor, targets: Tensor, share: float, known: float | None = None) -> Tensor:
        """Add the gradients of a batch (B, T), multiplied by `share`; return the mean divergence and text loss.

        Args:
            tokens: The inputs.
            targets: The text's token at each output, IGNORE_INDEX where there is none.
            share: Factor of the gradients.
            known: By which the loss of the text is divided; the number of targets unless given.
        """
        with torch.no_grad():
            theirs = self.teacher.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        ours = self.student.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        number, known = targets.numel(), known or max(1, int((targets != IGNORE_INDEX).sum()))
        leaf = ours.detach().requires_grad_()
        total = torch.zeros(2, device=tokens.device)
        chunks = (x.flatten(0, 1).split(LOGITS_CHUNK) for x in (leaf, theirs, targets[..., None]))
        for mine, their, target in zip(*chunks, strict=True):
            divergence, text = self._losses(self._heads, mine, their, target[:, 0])
            divergence, text = divergence / number, text / known
            (share * (divergence + self.next_token * text)).backward()
            total += torch.stack([divergence, text]).detach()
        # The logits of all tokens are never in memory: chunk by chunk they gave the gradients of the hidden states.
        ours.backward(leaf.grad)
        return total


class OutputHead(NamedTuple):
    """What maps hidden states to logits: the last layer, the divisor of its outputs, and their bound."""

    layer: Any
    divisor: float
    cap: float | None

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """Return that of a model of transformers."""
        layer = getattr(model, "cls", None) or model.get_output_embeddings()
        divisor = getattr(model.config, "logits_scaling", 1.0)
        return cls(layer, divisor, getattr(model.config, "final_logit_softcapping", None))

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return log p of every token, in float32."""
        logits: Tensor = self.layer(hidden) / self.divisor
        logits = logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
        return logits.float().log_softmax(-1)


def _losses(
    heads: tuple[OutputHead, OutputHead], mine: Tensor, theirs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the summed divergence of the teacher's distribution, and the summed loss of the text."""
    found = heads[0].log_probabilities(mine)
    with torch.no_grad():
        wanted = heads[1].log_probabilities(theirs)
    divergence = F.kl_div(found, wanted, log_target=True, reduction="sum")
    return divergence, F.nll_loss(found, targets, reduction="sum", ignore_index=IGNORE_INDEX)


@cache
def _compiled_losses() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_losses, dynamic=False)


def compile_layers(models: Sequence[Any], compiled: bool) -> None:
    """Compile the layers of models, the same code for all of them, or undo that."""
    for model in models:
        for layer in model_layers(model):
            if compiled:
                layer.compile(dynamic=False)
            else:
                layer._compiled_call_impl = None


def model_layers(model: Any) -> Any:
    """Return the list of a model's layers."""
    return model.base_model.get_submodule(FAMILIES[model.config.model_type].layers)


@torch.no_grad()
def replacement_damage(teacher: Any, student: Any, tokens: Tensor) -> Tensor:
    """Return how far the teacher's distributions move (B, T) if one layer's attention is the student's, for each layer.

    The measure is the mean Kullback-Leibler divergence of a token.
    """
    family, heads = FAMILIES[teacher.config.model_type], (OutputHead.of(teacher),) * 2
    expected = teacher.base_model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
    unknown, damages = tokens.new_full((len(expected),), IGNORE_INDEX), []
    for old, new in zip(model_layers(teacher), model_layers(student), strict=True):
        attention = old.get_submodule(family.attention)
        old.set_submodule(family.attention, new.get_submodule(family.attention))
        try:
            found = teacher.base_model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        finally:
            old.set_submodule(family.attention, attention)
        chunks = (x.split(LOGITS_CHUNK) for x in (found, expected, unknown))
        damages.append(sum(_losses(heads, *chunk)[0] for chunk in zip(*chunks, strict=True)) / len(expected))
    return torch.stack(damages)  # type: ignore[arg-type]
