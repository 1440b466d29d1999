"""Opens longspan models in transformers with trust_remote_code=True; all code is in the package longspan."""

try:
    from longspan import hf
    from longspan.hf import swap
except ImportError as error:
    raise ImportError(f"this model needs longspan: pip install 'longspan[hf]' ({error})") from error


def __getattr__(name: str) -> object:
    """Return a class of longspan.hf."""
    return getattr(swap if name.startswith("Swapped") else hf, name)
