"""Speed and memory, side by side in one run."""
