"""What runs have to say for themselves: tables and pictures over many of them."""
