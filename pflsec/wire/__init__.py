"""Everything that crosses between client and server: the channel, its ledger, and captures of what it carried."""
