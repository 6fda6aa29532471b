"""Large linear programs by the prices of GPU types: the boxstep method."""
