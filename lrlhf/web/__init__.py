"""What the services have in common: limits of connections and bodies, and what they log."""
