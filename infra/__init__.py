"""WHERE it runs: settings, Ray, placement, object stores, local services."""
