"""Plumbing that knows nothing of classes: errors, text, files, locks, devices, ranks, events."""
