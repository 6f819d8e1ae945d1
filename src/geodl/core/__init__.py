"""Infrastructure that knows nothing of classes: errors, text, files, locks, the cache, decoding of images, devices, ranks, events."""
