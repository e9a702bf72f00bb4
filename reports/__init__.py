"""What runs did and gave away: tables, figures and one page, made from run folders alone.

load      a run folder as data; damage becomes one sentence
tables    runs as data frames of numbers
figures   gallery, accuracy against leakage, learning curves
words     headlines, threat models and commands as text
page      everything as one self-contained HTML file
"""
