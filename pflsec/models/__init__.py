"""Network architectures, and the functional view of any module cut into body and head."""
