"""A model as a folder with one static page that recognizes images in the browser."""
