"""Changes of layout: their steps, cheapest paths and prices."""
