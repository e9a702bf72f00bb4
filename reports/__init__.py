"""What runs did and gave away: tables, figures and one page, made from run folders alone.

load      a run folder as data; damage becomes one sentence
groups    runs that differ by their seed alone
tables    runs as data frames of numbers; grids: the same as text; exports: CSV, JSON and LaTeX
frontier  accuracy against leakage, a point for each method, and its controls
figures   gallery, frontier and curves as PNG, SVG and PDF; charts: what plotly draws of them
words     headlines and findings as text; threats: threat models; controls; commands: how to repeat a run
page      everything as one self-contained HTML file, with parts and html; frontier_page: the frontier alone
"""
