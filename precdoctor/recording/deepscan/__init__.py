"""The deep scan: a few healthy steps whose ops are examined one by one as they run, for what module outputs cannot
show.
"""
