"""What peers say to each other: tensors, messages, frames. No network, no torch."""
