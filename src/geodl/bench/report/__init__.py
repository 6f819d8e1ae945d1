"""What people look at: tables beside the published numbers, figures for papers, one HTML page."""
