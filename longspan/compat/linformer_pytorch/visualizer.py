"""Plots of attention weights, as in linformer-pytorch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longspan.compat.linformer_pytorch.layers import LinearAttentionHead, MHAttention
from longspan.compat.linformer_pytorch.linformer_pytorch import Linformer, LinformerLM

__all__ = ["Visualizer"]


class Visualizer:
    """Attention weights of a model that was called with visualize=True."""

    def __init__(self, net: Linformer | LinformerLM | MHAttention) -> None:
        if not isinstance(net, Linformer | LinformerLM | MHAttention):
            raise ValueError(f"Visualizer takes a Linformer, LinformerLM or MHAttention, got a {type(net).__name__}")
        self.net = net

    def maps(self) -> list[Tensor]:
        """Return the weights of the first sequence for each layer.

        They are (heads, n, k) over compressed keys, or (heads, n, m) over the keys of full attention.
        """
        layers = [layer for layer in self.net.modules() if isinstance(layer, MHAttention)]
        maps = []
        for layer in layers:
            weights = [head.P_bar for head in layer.heads if isinstance(head, LinearAttentionHead)]
            found = [x[0] for x in weights if x is not None]
            if not found or len(found) < len(layer.heads):
                raise ValueError("there is nothing to plot: call the net with visualize=True first")
            maps.append(torch.stack(found))
        return maps

    def get_head_visualization(self, depth_no: int, max_depth: int, head_no: int, n_limit: int | None, axs: Any) -> Any:
        """Plot the weights of one head.

        Args:
            depth_no: The layer, from 0.
            max_depth: The last layer.
            head_no: The head, from 0.
            n_limit: The number of queries to plot; None for all.
            axs: An array (layers, heads) of matplotlib's axes.

        Returns:
            The image.
        """
        return _plot(axs[depth_no, head_no], self.maps()[depth_no][head_no], depth_no, max_depth, head_no, n_limit)

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
                _plot(axes[i, h], weights, i, len(maps) - 1, h, n_limit)
        if save_file is not None:
            figure.savefig(save_file)
        if show:
            pyplot.show()
        pyplot.close(figure)


def _plot(ax: Any, weights: Tensor, layer: int, last: int, head: int, n_limit: int | None) -> Any:
    image = ax.imshow(weights[:n_limit].float().cpu().numpy(), cmap="Reds", aspect="auto", interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    if head == 0:
        ax.set_ylabel(f"Layer {layer + 1}")
    if layer == last:
        ax.set_xlabel(f"Head {head + 1}")
    return image
