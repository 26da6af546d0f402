"""Ways of keeping the state that a segment saw: one engine a file, none knows another."""
