//! Three nodes in one process: real journals, real connections, records in memory.
