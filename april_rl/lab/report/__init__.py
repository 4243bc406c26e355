"""report.html and the comparison of runs: pages made from run directories alone."""
