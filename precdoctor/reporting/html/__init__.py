"""The HTML report: one file to look at, to send and to print; see :func:`precdoctor.reporting.html.page.render`."""
