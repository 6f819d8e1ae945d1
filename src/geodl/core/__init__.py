"""Plumbing that knows nothing of classes: errors, text, files, locks, the cache, decoding of pictures, devices, ranks, events."""
