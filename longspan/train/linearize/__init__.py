"""Turn a pretrained softmax model into one with a state of constant size: `longspan linearize`."""
