"""A model directory behind a page and an HTTP interface."""
