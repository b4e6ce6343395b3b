"""How messages travel: dial, serve and records, behind one seam with two implementations."""
