export SETTING=sourced
