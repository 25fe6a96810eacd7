"""Meshes and strategies. Import names from here or from ``automodel``."""
