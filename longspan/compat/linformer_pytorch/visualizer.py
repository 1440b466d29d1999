"""Pictures of attention, as linformer-pytorch draws them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longspan.compat.linformer_pytorch.layers import MHAttention
from longspan.compat.linformer_pytorch.linformer_pytorch import Linformer, LinformerLM
from longspan.mechanisms.linformer import LinformerAttention
from longspan.models.attention_maps import attention_map, compressed_map
from longspan.models.layers import Attention

__all__ = ["Visualizer"]


class Visualizer:
    """The heads of a net that was called with visualize=True."""

    def __init__(self, net: Linformer | LinformerLM | MHAttention) -> None:
        if not isinstance(net, Linformer | LinformerLM | MHAttention):
            raise ValueError(f"Visualizer takes a Linformer, LinformerLM or MHAttention, got a {type(net).__name__}")
        self.net = net

    def maps(self) -> list[Tensor]:
        """For each layer the first sequence's weights (heads, n, k) on compressed rows, or (heads, n, n) on keys."""
        if self.net.last_seen is None:
            raise ValueError("there is nothing to show yet: call the net with visualize=True")
        seen = dict(self.net.last_seen)
        calls: list[tuple[Attention, tuple[Any, ...], dict[str, Any]]] = []

        def note(layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls.append((layer, arguments, named))

        layers = [m for m in self.net.model.modules() if isinstance(m, Attention)]
        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        training = self.net.training
        self.net.eval()
        try:
            with torch.no_grad():
                if isinstance(self.net, LinformerLM):
                    self.net.model.hidden(seen.pop("tokens"), **seen)
                elif isinstance(self.net, Linformer):
                    self.net.model(seen.pop("x"), **seen)
                else:
                    self.net.model(**seen)
                return [_map(*call) for call in calls]
        finally:
            for hook in hooks:
                hook.remove()
            self.net.train(training)

    def plot_all_heads(
        self,
        title: str = "Visualization of Attention Heads",
        show: bool = True,
        save_file: str | None = None,
        figsize: tuple[float, float] = (8, 6),
        n_limit: int | None = None,
    ) -> None:
        """A row of pictures for each layer: queries down, compressed rows across. n_limit: the first so many queries.

        In a decoder self- and cross-attention are layers of their own.
        """
        maps = self.maps()
        try:
            pyplot = import_module("matplotlib.pyplot")
        except ImportError as error:
            raise ImportError("plot_all_heads needs matplotlib: pip install 'longspan[train]'") from error
        figure, axes = pyplot.subplots(len(maps), len(maps[0]), figsize=figsize, squeeze=False, layout="constrained")
        figure.suptitle(title)
        for i, heads in enumerate(maps):
            for h, weights in enumerate(heads):
                ax = axes[i, h]
                ax.imshow(weights[:n_limit].float().cpu().numpy(), cmap="Reds", aspect="auto", interpolation="nearest")
                ax.set_xticks([])
                ax.set_yticks([])
                if h == 0:
                    ax.set_ylabel(f"Layer {i + 1}")
                if i == len(maps) - 1:
                    ax.set_xlabel(f"Head {h + 1}")
        if save_file is not None:
            figure.savefig(save_file)
        if show:
            pyplot.show()
        pyplot.close(figure)


def _map(layer: Attention, arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """(heads, n, k) or (heads, n, m), of the first sequence of the batch."""
    given = dict(zip(("x", "rows", "context"), arguments, strict=False)) | named
    x, context = given["x"][:1], given.get("context") if layer.cross else None
    rows = given.get("context_rows" if layer.cross else "rows")
    mask = None if rows is None or rows.key_mask is None else rows.key_mask[:1]
    if isinstance(layer.mechanism, LinformerAttention) and not layer.cross:
        return compressed_map(layer, x, key_mask=mask)[0]
    context = None if context is None else context[:1]
    return attention_map(layer, x, range(x.shape[1]), key_mask=mask, context=context)[0]
