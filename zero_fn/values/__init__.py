"""Decisions as pure values, which take no memory and communicate nothing: tiers, homes,
meshes, layouts, units, schedules."""
