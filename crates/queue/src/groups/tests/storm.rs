//! Storms of random requests.
