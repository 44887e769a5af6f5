"""What ``sleepbackends verify`` does, apart from its screen: the contract suite on this machine."""
