"""What can be measured: mechanisms, layers, models, memory, and peers."""
