"""Values in; tables and text out. Nothing here computes a figure."""
