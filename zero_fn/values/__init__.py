"""Pure values, without memory and without communication: tiers, homes, meshes, layouts, units, schedules."""
