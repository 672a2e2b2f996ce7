"""Sweeps of the regulariser's temperature: many ensembles trained alike, and the frontier that they trace."""
