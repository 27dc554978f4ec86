"""Analysis: what runs show, as tables, pictures and pages. Nothing imports it but the command line."""
