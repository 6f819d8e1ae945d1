// What the modules of the page share. model: what GET model answered; state: the state of the model that the server told
// last, null while it does not answer; round: another number whenever answers may have changed; jobs, tray and pictures:
// the server's; shown: the classes that were named on this page and have no images yet.
export const page = { model: null, state: null, round: 0, jobs: [], tray: [], pictures: [], shown: new Set() };

export const locked = () => Boolean(page.model && page.model.read_only);
