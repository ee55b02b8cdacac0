"""Reports: tables and pictures over many runs."""
