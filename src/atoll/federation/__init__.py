"""Several facilities train one model: updates, their aggregation, and the campaign around it."""
