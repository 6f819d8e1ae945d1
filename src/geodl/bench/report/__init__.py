"""Reports: tables with published numbers, figures for papers, an HTML page."""
