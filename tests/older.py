"""The older libraries beside ours: the originals where installed, their checkpoints' names, their documents' code."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

REFERENCE = Path(__file__).parents[2] / "shared" / "reference"


def original(name: str) -> ModuleType:
    """An older library, or a module of it; a skip where it is not installed, unless PARITY=required."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except ImportError as error:
            if os.environ.get("PARITY") == "required":
                raise
            pytest.skip(f"{name} cannot be imported ({error}): install longspan[parity]")


def reference_state_dict(variant: str) -> dict[str, list[Any]]:
    """{name: [shape, dtype, kind, …]} of one variant of the recorded state dicts."""
    return recorded()[variant]


def recorded() -> dict[str, dict[str, list[Any]]]:
    path = REFERENCE / "state_dicts.json"
    if not path.exists():
        pytest.skip("the recorded names of the older libraries' checkpoints are not here")
    return json.loads(path.read_text())


def assert_names(module: nn.Module, variant: str) -> None:
    """The module's state dict has exactly the recorded names, shapes and dtypes, and takes them back."""
    wanted = reference_state_dict(variant)
    held = module.state_dict()
    assert set(held) == set(wanted)
    for name, (shape, dtype, *_) in wanted.items():
        assert list(held[name].shape) == shape, name
        assert str(held[name].dtype).removeprefix("torch.") == dtype, name
    generator = torch.Generator().manual_seed(5)
    given = {name: torch.randn(x.shape, generator=generator).to(x.dtype) for name, x in held.items()}
    for name, (_, _, kind, *alias) in wanted.items():
        if alias:
            given[name] = given[alias[0].removeprefix("alias_of:")]
        elif kind != "param":
            given[name] = held[name]
    module.load_state_dict(given)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, given[name], rtol=0, atol=0, msg=name)


def defined_names(library: str) -> list[str]:
    """`submodule.name` of each class and function that an older library defines at module level."""
    package = original(library)
    found = []
    for info in pkgutil.iter_modules(package.__path__):
        module = original(f"{library}.{info.name}")
        for name, value in vars(module).items():
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__:
                found.append(f"{info.name}.{name}")
    return found


def assert_same_tree(theirs: nn.Module, ours: nn.Module) -> None:
    """Modules, parameters, buffers and state dict have the same names in the same order, and the same shapes."""
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    for listed in ("named_parameters", "named_buffers"):
        mine, wanted = ([(n, tuple(x.shape)) for n, x in getattr(net, listed)()] for net in (ours, theirs))
        assert mine == wanted, listed
    mine, wanted = ([(n, tuple(x.shape)) for n, x in net.state_dict().items()] for net in (ours, theirs))
    assert mine == wanted


def assert_same_scale(net: Any) -> None:
    """The weights of a new compat model are drawn as those of the longspan model that it converts to."""
    drawn, wanted = net.to_longspan().state_dict(), net.longspan_model().state_dict()
    for name, x in wanted.items():
        if x.is_floating_point() and x.numel() > 1:
            scale, other = float(drawn[name].std()), float(x.std())
            assert abs(scale - other) <= 0.15 * other, f"{name}: {scale:.3g} for {other:.3g}"


def copy_weights(theirs: nn.Module, ours: nn.Module) -> None:
    """Ours gets the weights of theirs, by its own load_state_dict."""
    ours.load_state_dict(theirs.state_dict())


def assert_close(ours: Tensor, theirs: Tensor, what: str = "", tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest value of theirs."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} for {tuple(theirs.shape)}"
    ours, theirs = ours.detach(), theirs.detach()
    scale = float(theirs.abs().max().clamp(min=1e-6))
    error = float((ours - theirs).abs().max())
    assert error <= tolerance * scale, f"{what}: {error:.2e} apart on a scale of {scale:.2e}"


def assert_parity(
    theirs: nn.Module,
    ours: nn.Module,
    call: Callable[[nn.Module], tuple[Tensor, Mapping[str, Tensor]]],
    vanishing: tuple[str, ...] = (),
) -> None:
    """Outputs, and gradients of parameters and inputs, of the same weights agree to 1e-5.

    call: runs a module; gives its output and the inputs, by name, whose gradients count. vanishing: how the names end
    of parameters whose gradient is 0 but for rounding, so that it has no scale of its own: both are, on that of others.
    """
    copy_weights(theirs, ours)
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        out, inputs = call(module)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(11))
        (out * weight).sum().backward()
        results.append((out.detach(), {name: x.grad for name, x in inputs.items()}))
    assert_close(results[1][0], results[0][0], "output")
    for name, gradient in results[0][1].items():
        assert_close(results[1][1][name], gradient, f"gradient of input {name}")
    given = gradients(ours)
    for name, parameter in theirs.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if vanishing and name.endswith(vanishing):
            scale = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
            for gradient in (given[name], wanted):
                assert float(gradient.abs().max()) <= 1e-5 * scale, f"the gradient of {name} does not vanish"
            continue
        assert_close(given[name], wanted, f"gradient of {name}")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients under the names of the older library: those of its state dict."""
    twin = copy.deepcopy(module)
    for mine, parameter in zip(twin.parameters(), module.parameters(), strict=True):
        mine.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    return twin.state_dict()


def blocks(document: str) -> list[str]:
    """The Python code blocks of an older library's README."""
    path = REFERENCE / document
    if not path.exists():
        pytest.skip(f"{document} is not here")
    return re.findall(r"^```(?:python|py)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def older_names() -> Iterator[dict[str, Any]]:
    """A namespace in which blocks run: the older names are ours, `.cuda()` is the CPU, `nn` is there."""
    from longspan.compat.import_hook import redirect_imports, use_device

    with redirect_imports(), use_device("cpu"):
        yield {"__name__": "__main__", "nn": nn}


def assert_optimizer_continues(theirs: nn.Module, mine: nn.Module, x: Tensor) -> None:
    """The state of Adam after some steps of the original continues with our model, to the same weights."""
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for _ in range(3):
        _step(theirs, optimizer, x)
    mine.load_state_dict(theirs.state_dict())
    resumed = torch.optim.Adam(mine.parameters(), lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _step(theirs, optimizer, x)
    _step(mine, resumed, x)
    for (name, p), (same, q) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == same
        # Adam divides by the size of a gradient, however small.
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
