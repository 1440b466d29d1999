"""Plots of attention weights, as in linformer-pytorch."""

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
    """Attention weights of a model that was called with visualize=True."""

    def __init__(self, net: Linformer | LinformerLM | MHAttention) -> None:
        if not isinstance(net, Linformer | LinformerLM | MHAttention):
            raise ValueError(f"Visualizer takes a Linformer, LinformerLM or MHAttention, got a {type(net).__name__}")
        self.net = net

    def maps(self) -> list[Tensor]:
        """Return the weights of the first sequence for each layer.

        They are (heads, n, k) over compressed keys, or (heads, n, n) over the keys of full attention.
        """
        if self.net.last_call is None:
            raise ValueError("there is nothing to plot: call the net with visualize=True first")
        tensor, arguments = self.net.last_call
        calls: list[tuple[Attention, tuple[Any, ...], dict[str, Any]]] = []

        def record(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((layer, args, kwargs))

        layers = [m for m in self.net.model.modules() if isinstance(m, Attention)]
        hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
        training = self.net.training
        self.net.eval()
        try:
            with torch.no_grad():
                self.net(tensor, **arguments)
                return [_weights(*call) for call in calls]
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
        """Plot the weights of each head, one row of plots per layer: queries down, compressed keys across.

        In a decoder, self- and cross-attention are separate layers.

        Args:
            title: The title of the figure.
            show: Whether to open a window.
            save_file: A file to save the figure to.
            figsize: The size of the figure in inches.
            n_limit: The number of queries to plot; all by default.
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


def _weights(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the weights (heads, n, k) or (heads, n, m) of the first sequence in the batch."""
    x, context = args[0][:1], kwargs["context"] if layer.cross else None
    if "_layouts" in kwargs:  # a layer of a model
        layout = kwargs["_layouts"][int(layer.cross)]
        mask = None if layout is None else layout.key_mask
    else:
        mask = kwargs["context_mask" if layer.cross else "key_mask"]
    mask = None if mask is None else mask[:1]
    if isinstance(layer.mechanism, LinformerAttention) and not layer.cross:
        return compressed_map(layer, x, key_mask=mask)[0]
    context = None if context is None else context[:1]
    return attention_map(layer, x, range(x.shape[1]), key_mask=mask, context=context)[0]
