"""What all operations share: dispatch, kernel launches, tiles, autograd helpers."""
