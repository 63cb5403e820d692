"""Ways of computing attention, behind one interface: `jflex._call.dispatch` selects one."""
