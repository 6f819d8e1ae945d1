"""What `IncrementalClassifier` is made of: taking images in, choosing defaults, a learn step, advice, export."""
