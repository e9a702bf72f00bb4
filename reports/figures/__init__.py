"""Figures as PNG, SVG and PDF, drawn with matplotlib; the page's interactive ones are those of `charts`.

style     how all look, and how they become files
labels    names beside points
gallery   what an attack rebuilt, beside the truth
curves    numbers by round
frontier  accuracy against leakage
"""

from pflsec.reports.figures.curves import accuracy_curves, epsilon_curves, loss_curves, norm_curves
from pflsec.reports.figures.frontier import frontier
from pflsec.reports.figures.gallery import gallery, has_pictures, psnr, write_gallery, write_sheet
from pflsec.reports.figures.style import encode, save, sentence

__all__ = [
    "accuracy_curves",
    "encode",
    "epsilon_curves",
    "frontier",
    "gallery",
    "has_pictures",
    "loss_curves",
    "norm_curves",
    "psnr",
    "save",
    "sentence",
    "write_gallery",
    "write_sheet",
]
