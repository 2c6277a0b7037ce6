"""Server rules that withstand attackers."""
