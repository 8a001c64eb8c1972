"""Scalars that the program reports by `ps.log`. Must not know pushes."""
