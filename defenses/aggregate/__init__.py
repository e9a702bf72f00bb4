"""Defenses where the uploads of a round come together: the method's server step sees one change and no single client's."""
