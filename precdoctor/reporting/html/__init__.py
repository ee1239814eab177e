"""The HTML report, a single file; see :func:`precdoctor.reporting.html.page.render`."""
